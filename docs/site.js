// Code and tables that are wider than the page are scrolled by keyboard, too. The theme wraps tables
// when it loads.
addEventListener("load", () => {
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap, pre > code")) {
    wide.tabIndex = 0;
  }
});
