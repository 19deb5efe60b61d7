"""What looks at a run and changes nothing."""
