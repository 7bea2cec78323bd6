"""Will it fit. May import: train, model, run."""
