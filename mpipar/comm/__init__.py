"""Collectives for arrays on raw mpi4py communicators.

The path of a call, from what the user means to the Isend:

    collectives   what each collective means: blocks, input, output
    group         the process group: chooses an algorithm (choice), keeps plans and counters
    plan          a schedule compiled for one rank: places, messages, additions
    run           executes a plan: posts, tests, adds
    persistent    the same for small calls, on requests made once; small is the short way there
    waiting       spins, gives the core away, sleeps; flight looks after waits that take long
"""
