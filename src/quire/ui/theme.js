// Sets the theme before the first paint; a plain script, so that nothing is drawn in the wrong one.
// The choice ("light" or "dark"; none: as the system) is kept in localStorage.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("quire.theme");
  } catch {
    // storage is switched off: as the system
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
})();
