"""The result of a launch: exit codes, reasons, snapshots of a hang."""
