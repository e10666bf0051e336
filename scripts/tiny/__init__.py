"""Parts of scripts/train_tiny.py: what makes the embedded checkpoint."""
