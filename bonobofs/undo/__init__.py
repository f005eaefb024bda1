"""Pre-images of changes, and taking changes back."""
