//! The `leasehold` command, as a process.
