// The theme adds a navigation landmark without a name to each block of code.
function unmark() {
  for (const nav of document.querySelectorAll("nav.md-code__nav:not([role])")) nav.setAttribute("role", "none");
}
unmark();
new MutationObserver(unmark).observe(document.body, { childList: true, subtree: true });
