"""An HTTP proxy in front of several servers, chosen by `routing`; extra `server`."""
