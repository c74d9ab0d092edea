"""The compiler passes, in order of running: trace, profile, place, fuse, split, lower."""
