"""One self-contained page about a run: settings, results, peers, problems.

facts.py reads the home; html_page.py renders the page. The page has no script and loads nothing from a network; its
content policy allows only its own styles. All text from peers is bounded and escaped.
"""
