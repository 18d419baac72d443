// Loads the figures of the overview again every few seconds, as long as somebody can see them.
"use strict";

(() => {
  const figures = document.getElementById("pgjobs-figures");
  const state = document.getElementById("pgjobs-state");
  const pause = document.getElementById("pgjobs-pause");
  const seconds = Number(state.dataset.seconds);
  let paused = false;
  let timer = null;

  const say = (text) => {
    if (state.textContent !== text) {
      state.textContent = text;
    }
  };

  const isBeingRead = () => {
    const selection = document.getSelection();
    return !selection.isCollapsed && figures.contains(selection.anchorNode);
  };

  // What people have opened, scrolled and focused stays so.
  const replace = (html) => {
    const open = [...figures.querySelectorAll("details[open]")].map((details) => details.id);
    const scrolled = [...figures.querySelectorAll(".pgjobs-scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
    const focusable = "a, summary, [tabindex]";
    const focused = [...figures.querySelectorAll(focusable)].indexOf(document.activeElement);
    const href = focused < 0 ? null : document.activeElement.getAttribute("href");
    figures.innerHTML = html;
    open.forEach((id) => document.getElementById(id)?.setAttribute("open", ""));
    figures.querySelectorAll(".pgjobs-scroll").forEach((one, n) => {
      [one.scrollLeft, one.scrollTop] = scrolled[n] ?? [0, 0];
    });
    if (focused >= 0) {
      const all = [...figures.querySelectorAll(focusable)];
      const same = href === null ? all[focused] : all.find((one) => one.getAttribute("href") === href);
      same?.focus({ preventScroll: true });
    }
  };

  const refresh = async () => {
    if (isBeingRead()) {
      return;
    }
    try {
      const response = await fetch("?fragment", { credentials: "same-origin", cache: "no-store" });
      if (response.redirected) {
        paused = true;
        pause.hidden = true;
        say("You have been logged out. Load the page again.");
      } else if (response.ok) {
        const html = await response.text();
        if (!paused) {
          replace(html);
          say(`Refreshed every ${seconds} s.`);
        }
      } else {
        say(`The figures are old: the site has answered with status ${response.status}. Trying again.`);
      }
    } catch {
      say("The figures are old: the site does not answer. Trying again.");
    }
  };

  const plan = () => {
    clearTimeout(timer);
    if (!paused && !document.hidden) {
      timer = setTimeout(() => refresh().finally(plan), seconds * 1000);
    }
  };

  pause.addEventListener("click", () => {
    paused = !paused;
    pause.textContent = paused ? "Resume" : "Pause";
    say(paused ? "Paused." : `Refreshed every ${seconds} s.`);
    if (paused) {
      plan();
    } else {
      refresh().finally(plan);
    }
  });

  document.addEventListener("visibilitychange", () => {
    if (document.hidden || paused) {
      plan();
    } else {
      refresh().finally(plan);
    }
  });

  pause.hidden = false;
  say(`Refreshed every ${seconds} s.`);
  plan();
})();
