"""What a program calls: crews, launchers, and what they return."""
