"""The dry run from inside: sessions, operators' values, libraries, torch.cuda."""
