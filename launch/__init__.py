"""All workers of a slice: slice.sh is the laptop's side, host.py a worker's (facts.py: what the hosts compare; runs.py:
what is asked of it from afar), and fetch.py brings the data to its disk."""
