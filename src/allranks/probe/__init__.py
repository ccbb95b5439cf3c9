"""What any script's ranks record about their own steps, with no change to the script.

Set up through the environment (see inject/), it imports nothing but torch and Python's own modules,
and whatever fails in it switches it off with one line in the rank's log.
"""
