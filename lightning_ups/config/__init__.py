"""How a command line and its YAML are read, and how their faults are reported."""
