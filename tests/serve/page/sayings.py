"""What the model of the page's tests replies, by the last word of the conversation."""

from tests.serve.scripts import SCRIPTS

ATTACK = '<img src=x onerror="document.title=1"><script>document.title=2</script>[a](javascript:alert(3))'
SAYINGS = {
    **SCRIPTS,
    "attack": [ATTACK, "\n\n```html\n", "<b>bold</b>\n", "```", "\n\nand `<i>` **<u>**"],
}
