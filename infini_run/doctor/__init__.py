"""`infini-run --doctor`: what each machine has for a launch, and what it means."""
