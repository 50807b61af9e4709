"""Which meshes a training job fits on, how much memory each takes, and how fast each is.

    models          sizes by name; the weights of a model, cut over tp and pp
    layout          one way to run a job, and all that mpipar can run
    saved           what the tape keeps of each operation: THE table to change with the operations
    memory          weights, gradients, optimiser, activations of a layout
    machine         speeds: given, read from a file, or measured here
    compute         seconds of forward, backward and weight gradients of a stage
    communication   bytes and seconds of each axis of the mesh, from simulated schedules
    search          all of it together: the layouts that fit, fastest first
    published       the formulas of others, as a reference
    check           predicted beside measured, on the ranks of a real job

Times come from the schedules that training runs (`schedule.simulate`, `schedule.pipeline`), so 64
and 100,000 ranks are the same question.
"""
