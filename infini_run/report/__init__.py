"""What a launch has to say when it has ended: exit codes, reasons, snapshots of a hang."""
