"""The protocol: what ranks send each other, how a request is repeated until it is answered, and which workers are
members."""
