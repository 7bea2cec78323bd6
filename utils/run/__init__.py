"""The process, its folder, its words. May import: none of the other rooms."""
