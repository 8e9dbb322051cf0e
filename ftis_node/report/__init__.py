"""One self-contained page of a run: what it is, what it reached, with whom, and what went wrong.

facts.py gathers what a home knows, page.py makes a page of it. The page has no script, asks nothing of any network and
says so to the browser (its policy allows no more than its own styles); all text in it that came from elsewhere is
bounded and escaped.
"""
