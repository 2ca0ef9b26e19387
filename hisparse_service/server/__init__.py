"""The control loop: sockets, dispatch and events."""
