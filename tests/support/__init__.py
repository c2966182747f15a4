"""What tests of several rooms share: folders, faults, cells that fail, templates of messages."""
