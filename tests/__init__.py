"""The tests, a folder for each part of the package; what several of them use lies in support/ and programs/."""
