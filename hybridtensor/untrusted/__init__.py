"""Reading what may come from someone else: files, pickles as data, metadata, values.

Nothing that is read here runs anything, changes the process, or takes more memory than it says.
"""
