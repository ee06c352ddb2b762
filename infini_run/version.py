"""The version, where reading the package's metadata would take longer than the launch (a test compares them)."""

VERSION = "0.3.0"
