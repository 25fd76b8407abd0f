"""Ways to guess the next tokens of requests, one file per method; `base.py` is the contract."""
