"""Times of the engine on this machine, one command each: `ksana bench host`, `ksana bench throughput`."""
