"""An HTTP proxy in front of several servers, which `router` chooses among; extra `server`."""
