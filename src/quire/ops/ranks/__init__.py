"""Exchange between processes that compute one model together."""
