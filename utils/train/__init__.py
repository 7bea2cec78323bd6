"""What a training loop needs. May import: model, run."""
