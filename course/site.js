/* What the site's pages do beside their theme. */

// A result's excerpt is fetched from its page, which a browser forbids to pages that are files.
DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol !== "file:";

// What scrolls inside its own box can be reached by the keyboard, too.
function reach() {
  for (const box of document.querySelectorAll("article pre")) {
    if (box.scrollWidth > box.clientWidth + 1) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
addEventListener("load", reach);
addEventListener("resize", reach);

// The live page is dark when the page around it is; all else that its reader has chosen stays.
addEventListener("DOMContentLoaded", () => {
  const live = document.querySelector("iframe.live"), page = document.documentElement;
  if (!live) return;
  const follow = () => live.contentWindow.postMessage({ theme: page.dataset.theme }, "*");
  live.src = live.getAttribute("src").split("#")[0] + "#method=h2o&theme=" + page.dataset.theme;
  live.addEventListener("load", follow);
  new MutationObserver(follow).observe(page, { attributeFilter: ["data-theme"] });
});
