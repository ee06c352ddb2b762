"""What tests share. No file here is a test."""
