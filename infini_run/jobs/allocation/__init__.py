"""What runs on the first node of an allocation."""
