"""What crosses the wire: frames, the handshake, and the measure of how fast they went. Pure."""
