"""A model that stays loaded: commands send their jobs to a background process of this user, over a private socket.

    rekindle run ...   client.py  --- job, one line of JSON -->  answering.py, process.py   the engine, and a session
                                  <-- events, one per line ---   jobs.py                    what it does for a job

`rekindle serve` takes the jobs of commands for its own model, too.
"""
