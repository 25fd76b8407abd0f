"""The libraries that follow a grammar token by token, behind one interface."""
