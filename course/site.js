/* What the site's pages do beside their theme. */

// A result's excerpt is fetched from its page, which a browser forbids to pages that are files.
DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol !== "file:";

// The live page is dark when the page around it is; all else that its reader has chosen stays.
addEventListener("DOMContentLoaded", () => {
  const live = document.querySelector("iframe.live"), page = document.documentElement;
  if (!live) return;
  const follow = () => live.contentWindow.postMessage({ theme: page.dataset.theme }, "*");
  live.src = live.getAttribute("src").split("#")[0] + "#method=h2o&theme=" + page.dataset.theme;
  live.addEventListener("load", follow);
  new MutationObserver(follow).observe(page, { attributeFilter: ["data-theme"] });
});
