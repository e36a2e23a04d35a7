"""What happened to a run, read from its files: on a login node, without torch, without a server.

- `attempts`      events as attempts of tasks and rounds of the group
- `node_time`     where the node-seconds went
- `timeline`      events as episodes; `causes` why the group changed, and what that cost
- `sentences`     episodes as text
- `progress_log`  the lines of progress.jsonl, and the pace that they show
- `report`        all of it as values: the JSON form
- `charts`        the report's JSON as Vega-Lite, and numbers as people read them (pure)
- `page`          the report as HTML and PNG; needs the extra ``report``
- `log_files`     which logs there are, and their lines in order of time; `log_follow` as they grow
"""
