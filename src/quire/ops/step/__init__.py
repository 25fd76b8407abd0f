"""What begins a step: ids, positions and slots of its tokens."""
