"""A run's report as a page and as a picture; `story.report` says what is in it.

`charts` and `words` are pure: they turn the report's JSON form into Vega-Lite and into text.
`page` and `picture` need the extra ``report`` (vl-convert, which brings Vega along): imported when
they are called, on a login node.
"""
