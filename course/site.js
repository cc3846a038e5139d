/* What the site's pages do beside their theme. */

// A result's excerpt is fetched from its page, which a browser forbids to pages that are files.
DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol !== "file:";

// The explorer is dark when the page around it is.
addEventListener("DOMContentLoaded", () => {
  const explorer = document.querySelector("iframe.explorer"), page = document.documentElement;
  if (!explorer) return;
  const follow = () => {
    explorer.src = explorer.getAttribute("src").split("#")[0] + "#method=h2o&theme=" + page.dataset.theme;
  };
  follow();
  new MutationObserver(follow).observe(page, { attributeFilter: ["data-theme"] });
});
