"""Inside a rank: signals, the gate, and the controller that ties them to events."""
