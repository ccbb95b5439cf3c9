"""Records the steps of any script's ranks, with no change to the script.

It is loaded through the environment (see inject/) and imports only torch and the standard library.
If anything in it fails, it switches itself off with one line in the rank's log.
"""
