"""What a Python program calls: `mh.train()`, `mh.resume()` and `mh.join()`. The commands are users of it.

training.py      mh.train() and mh.resume()
starts.py        a start of a run, which they share with the commands
job_source.py    an instance of a job: where its class is found, and its fields as text
saved_class.py   the source of a class that no file can be imported for
result.py        mh.Result; curves.py draws it
options.py       the options of a training; where.py, where_ray.py: where its members run
own_loop.py      mh.join()
"""
