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

// A figure's letters are small on a phone: a tap opens the figure by itself, to be drawn larger by hand.
addEventListener("DOMContentLoaded", () => {
  for (const figure of document.querySelectorAll("article img")) {
    if (figure.closest("a")) continue;
    const link = document.createElement("a");
    link.href = figure.src;
    figure.replaceWith(link);
    link.append(figure);
  }
});

// The live page is dark when the page around it is; all else that its reader has chosen stays.
addEventListener("DOMContentLoaded", () => {
  const live = document.querySelector("iframe.live"), page = document.documentElement;
  if (!live) return;
  const follow = () => live.contentWindow.postMessage({ theme: page.dataset.theme }, "*");
  live.src = live.getAttribute("src").split("#")[0] + "#theme=" + page.dataset.theme;
  live.addEventListener("load", follow);
  new MutationObserver(follow).observe(page, { attributeFilter: ["data-theme"] });
});
