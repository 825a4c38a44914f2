"""Times and memory of the engine on this machine: `ksana bench host`, `ksana bench throughput`, `peak_memory`."""
