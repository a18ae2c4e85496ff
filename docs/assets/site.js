// What scrolls can be reached by the keyboard, and the search has a name; the theme leaves out both.
function makeAccessible() {
  document.querySelector(".md-search")?.setAttribute("aria-label", "Search");
  for (const each of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) each.tabIndex = 0;
}
makeAccessible();
addEventListener("load", makeAccessible); // the theme has wrapped the tables by then
