"""What both sides agree on: messages, errors, geometry, the segment's layout, keys and limits."""
