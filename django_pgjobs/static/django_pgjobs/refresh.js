// Keeps a part of a page fresh: <div id="..." data-pgjobs-refresh="SECONDS">. When that part comes back
// without the attribute, or the site leads elsewhere, nothing is left to wait for, and the whole page is loaded
// once more.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  document.querySelectorAll("[data-pgjobs-refresh]").forEach((part) => {
    const look = async () => {
      if (!document.hidden) {
        try {
          const response = await fetch(location.href, { credentials: "same-origin", cache: "no-store" });
          const page = new DOMParser().parseFromString(await response.text(), "text/html");
          const fresh = response.ok && page.getElementById(part.id);
          if (response.redirected || (fresh && !fresh.dataset.pgjobsRefresh)) {
            location.reload();
            return;
          }
          if (fresh) {
            part.replaceChildren(...fresh.childNodes);
          }
        } catch (error) {
          // The site is away; the next look may find it.
        }
      }
      setTimeout(look, 1000 * part.dataset.pgjobsRefresh);
    };
    setTimeout(look, 1000 * part.dataset.pgjobsRefresh);
  });
});
