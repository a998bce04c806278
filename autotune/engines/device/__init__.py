"""The device engine: compiles and runs on the attached accelerator, and times it there."""
