"""The schedule of a run before there are machines for it: the real loop under a virtual clock, with modelled parts."""
